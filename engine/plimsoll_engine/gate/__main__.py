"""``python -m plimsoll_engine.gate``: see --help for the flags, ``process`` for what happens then."""

from __future__ import annotations

import logging
import os
import sys

from plimsoll_engine.config import ConfigError
from plimsoll_engine.gate.config import parse_args
from plimsoll_engine.termination import write_termination_message


def main() -> int:
    """Returns the exit status: 0 after SIGTERM or SIGINT, 2 for a bad setting, else 1."""
    try:
        config = parse_args(sys.argv[1:], os.environ)
    except ConfigError as error:
        failure = error.to_failure()
        write_termination_message(failure)
        return failure.exit_status
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    from plimsoll_engine.gate.process import run_gate

    return run_gate(config)


if __name__ == "__main__":
    sys.exit(main())
