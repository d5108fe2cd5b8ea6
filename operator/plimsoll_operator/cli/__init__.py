"""`kubectl plimsoll`: what the tuner does and why, and what a manifest would become.

In: the command line, and where a command needs one, a cluster by kubeconfig. Out: text, JSON or
YAML; exit status 0 when all is well, 1 when a problem was found, 2 for a call that cannot be carried
out as it was written. Only `hold` and `resume` write, and only spec.tuning.mode of one object. What
is shown is made by pure functions of values; app.py and server.py are the edges.
"""
