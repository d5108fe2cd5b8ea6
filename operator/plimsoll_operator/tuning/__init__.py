"""Memory judgement: from what the engines report to the limits that should be in force.

Pure: values in (``now`` among them), values with their reasons out. Knows no cluster, client,
event loop or clock.
"""

from plimsoll_operator.tuning.tuner import decide

__all__ = ["decide"]
