"""Replays request traces over the engine's scheduler and the operator's tuner, in virtual time.

Only the GPU is simulated: how long a step takes (``step_time``) and how much memory is in use
(``memory_model``). This package knows no torch, no cluster and no clock.
"""
