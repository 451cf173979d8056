"""Input forms, as data: what callers pass instead of a page's inputs. A contract names one for an input (`schedule/contract.py`).

Gated DeltaNet's callers pass raw gates, for example: the model's gate x, with A_log and dt_bias of each value head. Then the page
reads -exp(A_log) * softplus(x + dt_bias). `passes/abi/caller_inputs.py` puts a form's value after the load of the input.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class InputForm:
    """How an input comes.

    doc: what a generated module says of the input {0}. value: what the page reads where the caller passes x, in the notation of
    pages. "" for forms of rows, which a pass carries out. heads: tensors that `value` names, with one number for each value
    head -> what the host passes for None, "" if the caller must give one. rows: whether the input has a row for each token;
    otherwise it has a number.
    """

    doc: str
    value: str = ""
    heads: Mapping[str, str] = field(default_factory=dict)
    rows: bool = False


#: Forms that differ from the page's. The least factor of "linear" is the smallest normal float32.
INPUT_FORMS: dict[str, InputForm] = {
    "linear": InputForm("{0} comes as the factor of which the kernels take the log.", "log(maximum(x, 1.1754943508222875e-38))"),
    "raw": InputForm("{0} comes raw: the kernels take -exp(A_log) softplus({0} + dt_bias).",
                     "-exp(A_log) * softplus(x + dt_bias)", heads={"A_log": "", "dt_bias": "0.0"}),
    "sigmoid": InputForm("{0} comes as it is before a sigmoid.", "sigmoid(x)"),
    "twice_sigmoid": InputForm("{0} comes as it is before twice a sigmoid.", "2 * sigmoid(x)"),
    "l2norm": InputForm("{0} comes as it is: the kernels divide its rows by their norms.", rows=True),
    "unit": InputForm("{0} has rows of norm 1: warm-up lengths do not need their norms.", rows=True),
}
