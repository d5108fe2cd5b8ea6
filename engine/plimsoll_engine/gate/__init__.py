"""The gate: the engine's admission policy as an HTTP proxy before stock vLLM."""
