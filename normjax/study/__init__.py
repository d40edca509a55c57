"""Declared studies that change one property at a time, paired over seeds."""

from __future__ import annotations

from normjax.study.analysis import Analysis as Analysis
from normjax.study.analysis import analyze as analyze
from normjax.study.caching import default_folder as default_folder
from normjax.study.cells import Cell as Cell
from normjax.study.cells import Curve as Curve
from normjax.study.comparison import Comparison as Comparison
from normjax.study.comparison import compare as compare
from normjax.study.comparison import load_judged as load_judged
from normjax.study.document import ConfigError as ConfigError
from normjax.study.norm_setting import NormSetting as NormSetting
from normjax.study.plan import Plan as Plan
from normjax.study.plan import make_plan as make_plan
from normjax.study.runs import run as run
from normjax.study.schema import Field as Field
from normjax.study.schema import Leaf as Leaf
from normjax.study.schema import Settings as Settings
from normjax.study.store import Results as Results
from normjax.study.store import UnfinishedError as UnfinishedError
from normjax.study.store import load as load
from normjax.study.summary import summarize as summarize
from normjax.study.summary import write_table as write_table
