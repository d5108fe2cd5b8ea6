"""``python -m plimsoll_engine``: see --help for the flags, ``process`` for what happens then."""

from __future__ import annotations

import logging
import os
import sys

from plimsoll_engine.config import ConfigError, parse_args
from plimsoll_engine.termination import write_termination_message

# Turns in which a thread of OpenMP waits before it sleeps. By default these are 300,000, some
# milliseconds: through every pause between two steps it would keep its core from the threads and
# clients that the next step waits for. This many are enough between two products of one step
# (docs/log.md). Threads of the CPU only.
_SPIN_COUNT = "20000"


def main() -> int:
    """Returns the exit status: 0 only after SIGTERM or SIGINT, 2 for a bad setting, else 1."""
    try:
        config = parse_args(sys.argv[1:], os.environ)
    except ConfigError as error:
        # Nothing but the settings has been imported yet: this is told within the second.
        failure = error.to_failure()
        write_termination_message(failure)
        return failure.exit_status

    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    # Its lines about start and stop say what ours say.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    if config.pods is not None and not config.pods.leads:
        from plimsoll_engine.parallel.member import run_member

        return run_member(config, config.pods)
    from plimsoll_engine.process import run_engine

    return run_engine(config)


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    # Everything is done and told. Tearing down the native libraries can only hang or crash.
    os._exit(status)
