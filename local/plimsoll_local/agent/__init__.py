"""The node agent: a kubelet for this machine that runs pods as plain local processes.

Kept free of imports: every container start loads this package once more, in its shim.
"""
