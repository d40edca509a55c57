"""Layers of other libraries: their conventions as specs, and nodes of ONNX models."""

from normjax.interop import onnx as onnx
from normjax.interop.conventions import CONVENTIONS as CONVENTIONS
from normjax.interop.conventions import arguments as arguments
from normjax.interop.conventions import convention as convention
from normjax.interop.conventions import notes as notes
from normjax.interop.record import Convention as Convention
