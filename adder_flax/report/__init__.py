"""What one learns from a run: the papers' claims, judged and drawn, maps of a trained model, its table of parts."""

from adder_flax.report._study import Claim, require_probabilities
from adder_flax.report._style import save_figure
from adder_flax.report.captures import BlockCapture, Capture, capture
from adder_flax.report.figures import (
    attention_figure,
    comparison_figure,
    curves_figure,
    second_order_figure,
    xor_figure,
)
from adder_flax.report.page import Report, write_report
from adder_flax.report.second_order import (
    SecondOrderStep,
    SecondOrderTerms,
    exact_gradients,
    second_order_along,
    second_order_terms,
)
from adder_flax.report.summary import SummaryRow, summary_rows, summary_text

__all__ = [
    "BlockCapture",
    "Capture",
    "Claim",
    "Report",
    "SecondOrderStep",
    "SecondOrderTerms",
    "SummaryRow",
    "attention_figure",
    "capture",
    "comparison_figure",
    "curves_figure",
    "exact_gradients",
    "require_probabilities",
    "save_figure",
    "second_order_along",
    "second_order_figure",
    "second_order_terms",
    "summary_rows",
    "summary_text",
    "write_report",
    "xor_figure",
]
