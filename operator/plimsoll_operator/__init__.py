"""The Plimsoll operator: LLMDeployment resources in, engine pods and tuned memory limits out."""

__version__ = "0.1.0"
