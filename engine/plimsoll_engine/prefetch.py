"""``python -m plimsoll_engine.prefetch --model ORG/NAME [--revision R]``: fills the local cache (HF_HOME)
with what an engine reads of a model, and ends.

In: a name of the Hugging Face hub. Out: exit status 0 and the commit on standard output; or 1 with the
same termination message as an engine that cannot load its model. Loads no weights.
"""

from __future__ import annotations

import argparse
import logging
import sys

from plimsoll_engine.models.source import resolve_model
from plimsoll_engine.termination import EngineFailure, write_termination_message


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="plimsoll_engine.prefetch", description=__doc__)
    parser.add_argument("--model", required=True, help="org/name on the Hugging Face hub")
    parser.add_argument("--revision", help="branch, tag or commit")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    try:
        source = resolve_model(options.model, options.revision)
    except EngineFailure as failure:
        write_termination_message(failure)
        return failure.exit_status
    print(f"{options.model} is in {source.folder} at {source.revision or 'no revision'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
