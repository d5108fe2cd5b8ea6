"""`kubectl-plimsoll`, and `python -m plimsoll_operator.cli`."""

from __future__ import annotations

import sys

from plimsoll_operator.cli.app import run


def main() -> None:
    sys.exit(run())


if __name__ == "__main__":
    main()
