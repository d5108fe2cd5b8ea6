"""The contract between operator and engine: engine_control.proto and the stubs made from it.

`make generate` rewrites the stubs; nothing else lives here.
"""
