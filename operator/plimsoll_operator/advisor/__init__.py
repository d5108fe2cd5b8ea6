"""MemoryAdvisor: the tuner's judgement over vLLM pods that somebody else runs.

In: a MemoryAdvisor, its target's pods and their metrics. Out: its status and Events; nothing else in
the cluster is ever written. The judgement is tuning/'s, in mode Advise.
"""
