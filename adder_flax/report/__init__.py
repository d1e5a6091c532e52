"""What one learns from a run: the papers' claims, judged and drawn, maps, the table of parts."""

from adder_flax.report._families import (
    ADDER,
    ADDITIVE,
    ALIGNMENT,
    BROWNIAN,
    CLAIMS,
    ENERGY,
    Section,
    register_claims,
)
from adder_flax.report._sequences import SequenceStudy, SequenceSubject
from adder_flax.report._study import (
    DOES_NOT_HOLD,
    HOLDS,
    NOT_MEASURED,
    Answers,
    Claim,
    Findings,
    ImageStudy,
    Picture,
    Study,
    only_when,
    require_probabilities,
)
from adder_flax.report._style import LINES, dress, legend, line, new_figure, save_figure
from adder_flax.report.bypass import Without, bypass, bypass_text, write_bypass
from adder_flax.report.captures import BlockCapture, Capture, capture, tokens_in_front
from adder_flax.report.expansion import (
    SecondOrderStep,
    SecondOrderTerms,
    second_order_along,
    second_order_terms,
)
from adder_flax.report.figures import (
    alignment_figure,
    attention_figure,
    comparison_figure,
    curves_figure,
    second_order_figure,
    xor_figure,
)
from adder_flax.report.page import Report, write_report, write_study
from adder_flax.report.studies import STUDIES, Trained, register_study
from adder_flax.report.summary import SummaryRow, summary_rows, summary_text

__all__ = [
    "ADDER",
    "ADDITIVE",
    "ALIGNMENT",
    "BROWNIAN",
    "CLAIMS",
    "DOES_NOT_HOLD",
    "ENERGY",
    "HOLDS",
    "LINES",
    "NOT_MEASURED",
    "STUDIES",
    "Answers",
    "BlockCapture",
    "Capture",
    "Claim",
    "Findings",
    "Picture",
    "Report",
    "SecondOrderStep",
    "SecondOrderTerms",
    "Section",
    "SequenceStudy",
    "SequenceSubject",
    "ImageStudy",
    "Study",
    "SummaryRow",
    "Trained",
    "Without",
    "alignment_figure",
    "attention_figure",
    "bypass",
    "bypass_text",
    "capture",
    "comparison_figure",
    "curves_figure",
    "dress",
    "legend",
    "line",
    "new_figure",
    "only_when",
    "register_claims",
    "register_study",
    "require_probabilities",
    "save_figure",
    "second_order_along",
    "second_order_figure",
    "second_order_terms",
    "summary_rows",
    "summary_text",
    "tokens_in_front",
    "write_bypass",
    "write_report",
    "write_study",
    "xor_figure",
]
