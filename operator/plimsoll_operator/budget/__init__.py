"""What one accelerator will hold, from a model's config.json alone: no cluster, GPU or weights.

Pure: configuration in, bytes with a verdict out. The engine measures at its start what is only
estimated here, and knows nothing of this package; a test holds the two together.
"""
