"""What each engine is started with; one module per engine."""
