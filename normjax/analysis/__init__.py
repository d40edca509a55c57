"""Jacobian geometry of real activations: what a layer does to every group of a file."""

from normjax.analysis.models import analyze_model as analyze_model
from normjax.analysis.record import ActivationAnalysis as ActivationAnalysis
from normjax.analysis.record import Distribution as Distribution
from normjax.analysis.record import Finding as Finding
from normjax.analysis.source import AnalysisError as AnalysisError
from normjax.analysis.stream import analyze as analyze
from normjax.analysis.tables import Tables as Tables
from normjax.analysis.tables import new_folder as new_folder
from normjax.analysis.tables import save_record as save_record
from normjax.analysis.tally import Extreme as Extreme
from normjax.analysis.tally import Flagged as Flagged
from normjax.analysis.tally import Histogram as Histogram
