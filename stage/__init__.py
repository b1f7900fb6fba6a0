"""Stage: a symbolic pre-execution workload synthesizer for distributed AI systems."""

__all__ = ["__version__"]

__version__ = "0.1.0"
