"""Models: where their files are, what their configuration says, the decoder, its weights."""
