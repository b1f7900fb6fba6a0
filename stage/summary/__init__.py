"""Summaries as plain values: the counts and closed forms of a model, and what a trace set holds."""

from stage.summary.model import model_summary
from stage.summary.traces import trace_summary

__all__ = ["model_summary", "trace_summary"]
