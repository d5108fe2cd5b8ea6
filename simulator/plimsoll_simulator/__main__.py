"""`python -m plimsoll_simulator`."""

from __future__ import annotations

from plimsoll_simulator.app import app

if __name__ == "__main__":
    app(prog_name="plimsoll-simulator")
