"""A model that became unstable: its norm layers, measured in a fixed sequence."""

from normjax.diagnosis.record import STEPS as STEPS
from normjax.diagnosis.record import Diagnosis as Diagnosis
from normjax.diagnosis.record import Finding as Finding
from normjax.diagnosis.sequence import diagnose as diagnose
