"""The Plimsoll serving engine: paged attention, continuous batching, limits that move live."""

__version__ = "0.1.0"
