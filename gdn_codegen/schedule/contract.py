"""The contract: how callers pass inputs and states. The default is what the page reads, without extra work.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..input_forms import INPUT_FORMS

DTYPES = ("float32", "float16", "bfloat16")
STATE_FLAGS = ("pool", "in_place", "checkpoints", "rows", "slots", "accepted", "parents", "frozen", "positions")
BY_TOKEN = ("rows", "slots", "accepted", "parents", "frozen")
STATE_WORDS = ("vk", *DTYPES, *STATE_FLAGS)
#: What a flag of states needs beside it (one of some groups), and what it excludes.
NEEDS = {"slots": (("pool", "in_place"),), "accepted": (("pool",),), "parents": (("rows",), ("slots",)),
         "frozen": (("rows",), ("accepted",))}
EXCLUDES = {"frozen": ("in_place",), "slots": ("rows",), "rows": ("checkpoints",), "checkpoints": ("slots", "accepted"),
            "positions": ("checkpoints", "rows", "slots", "accepted")}


class ContractError(ValueError):
    """A contract with an unknown name or value."""


@dataclass(frozen=True)
class Contract:
    """What callers pass. A build serves one contract.

    inputs: pairs (name of an input, input form, `input_forms`): "linear" (a gate as the factor exp(g)), "raw" (a gate x, from
      which the kernel computes -exp(A_log) softplus(x + dt_bias), with A_log and dt_bias [HV]; dt_bias=None is zero), "bounded"
      (instead lower_bound sigmoid(exp(A_log) (x + dt_bias))), "safe" (the same, with a lower_bound of -5 or more), "floored" (a
      log decay below -5 counts as -5), "sigmoid" and "twice_sigmoid" (the kernel applies this function),
      "l2norm" (the kernel divides rows by their norms), "unit" (the caller promises rows of norm 1).
    dtypes: pairs (name, dtype), for inputs of one number per token and head, log decays, A_log and dt_bias. Such an input must
      have that dtype. The host converts inputs that are not named to float32.
    state_layout: the order of a state's dims in memory, "kv" or "vk". state_dtype: its dtype.
    pool: states are in slots. The tensor `state_indices` gives the slot of each sequence; -1 skips a sequence.
    in_place: the final state overwrites the initial one.
    checkpoints: the state is also stored every n chunks; n is a number of the call.
    rows: the state after each chunk is stored in a row of the caller's buffer; a tensor gives the row of each sequence. slots: it
      is stored in a slot of the pool; `state_indices` gives a slot for each chunk of each sequence. So the chunk is one token.
    accepted: the initial state is in the slot of the chunk that `num_accepted_tokens` counts, not in that of the first chunk.
    parents: a chunk starts from the state after the chunk that a tensor names, its parent in a tree of draft tokens.
    frozen: no final state is stored.
    positions: the state is also stored after the chunks to which the tensor `checkpoint_rows` gives a row of the caller's buffer.
    strided: inputs with a contiguous last dim are read in place, by strides passed at run time.

    Raises ContractError, a ValueError.
    """

    inputs: tuple[tuple[str, str], ...] = ()
    dtypes: tuple[tuple[str, str], ...] = ()
    state_layout: str = "kv"
    state_dtype: str = "float32"
    pool: bool = False
    in_place: bool = False
    checkpoints: bool = False
    rows: bool = False
    slots: bool = False
    accepted: bool = False
    parents: bool = False
    frozen: bool = False
    positions: bool = False
    strided: bool = False

    def __post_init__(self) -> None:
        """ContractError for an unknown form, dtype or state layout, for inputs out of order or given twice, and for flags of
        states that do not go together."""
        for field, pairs, accepted in (("inputs", self.inputs, INPUT_FORMS), ("dtypes", self.dtypes, DTYPES)):
            for name, value in pairs:
                if value not in accepted:
                    raise ContractError(f"{field}: got {name}={value!r}; accepted: {', '.join(accepted)}")
            if list(pairs) != sorted(dict(pairs).items()):
                raise ContractError(f"{field}: got {pairs}; accepted: each name once, in order")
        if self.state_layout not in ("kv", "vk"):
            raise ContractError(f"state_layout: got {self.state_layout!r}; accepted: kv, vk")
        if self.state_dtype not in DTYPES:
            raise ContractError(f"state_dtype: got {self.state_dtype!r}; accepted: {', '.join(DTYPES)}")
        for flag in filter(self.__getattribute__, STATE_FLAGS):
            beside = NEEDS.get(flag, ((),))
            if not any(all(getattr(self, x) for x in group) for group in beside):
                raise ContractError(f"state: got {flag} alone; accepted: beside {' or '.join('/'.join(x) for x in beside)}")
            if against := [x for x in EXCLUDES.get(flag, ()) if getattr(self, x)]:
                raise ContractError(f"state: got {flag} and {against[0]}; accepted: one of them")

    @property
    def by_token(self) -> bool:
        """Whether states are kept or read for each token of a sequence, so that a chunk has one token."""
        return self.rows or self.slots or self.accepted

    @property
    def words_by_token(self) -> str:
        """The words for states by token, joined by /; "" without them."""
        return "/".join(filter(self.__getattribute__, BY_TOKEN)) if self.by_token else ""

    def input_form(self, name: str) -> str:
        """The input form of the input called `name`, "" for what the page reads."""
        return dict(self.inputs).get(name, "")

    def unpromised(self) -> Contract:
        """The contract without promises that rows have norm 1."""
        return replace(self, inputs=tuple(x for x in self.inputs if x[1] != "unit"))

    def dtype(self, name: str) -> str:
        """The dtype in which callers pass an input of one number per token or head."""
        return dict(self.dtypes).get(name, "float32")

    def __str__(self) -> str:
        """The text that `parse` reads, such as "beta=sigmoid,g=raw/float16,state=vk/bfloat16/pool,strided"."""
        names = sorted(dict(self.inputs) | dict(self.dtypes))
        words = {n: [x for x in (self.input_form(n), dict(self.dtypes).get(n, "")) if x] for n in names}
        states = [x for x, plain in ((self.state_layout, "kv"), (self.state_dtype, "float32")) if x != plain]
        states += [x for x in STATE_FLAGS if getattr(self, x)]
        if states:
            words["state"] = states
        return ",".join([*(f"{n}={'/'.join(x)}" for n, x in words.items()), *(["strided"] if self.strided else [])])

    @property
    def tag(self) -> str:
        """The part of a build's name that tells contracts apart."""
        return str(self).replace("=", "").replace("/", "").replace(",", "_").replace("in_place", "inplace")

    @classmethod
    def parse(cls, text: str) -> Contract:
        """The contract whose `str` is `text`. Raises ContractError for unknown words, and if the text says something twice."""
        inputs: dict[str, str] = {}
        dtypes: dict[str, str] = {}
        fields: dict[str, Any] = {}

        def put(into: dict[str, Any], key: str, value: Any, what: str) -> None:
            if key in into:
                raise ContractError(f"accept: got {text!r}, which gives {what} twice; accepted: once")
            into[key] = value
        for item in filter(None, text.split(",")):
            name, _, words = item.partition("=")
            for word in words.split("/") if words else [""]:
                own = name not in ("", "state", "strided")
                if (item, word) == ("strided", ""):
                    put(fields, "strided", True, "that inputs are strided")
                elif name == "state" and word in STATE_WORDS:
                    field = "state_layout" if word == "vk" else "state_dtype" if word in DTYPES else word
                    put(fields, field, word if field in ("state_layout", "state_dtype") else True,
                        "the dtype of states" if word in DTYPES else item)
                elif own and word in INPUT_FORMS:
                    put(inputs, name, word, f"how {name} comes")
                elif own and word in DTYPES:
                    put(dtypes, name, word, f"the dtype of {name}")
                else:
                    raise ContractError(f"accept: got {item!r}; accepted: INPUT={'|'.join((*INPUT_FORMS, *DTYPES))}, "
                                        f"state={'|'.join(STATE_WORDS)}, strided")
        return cls(tuple(sorted(inputs.items())), tuple(sorted(dtypes.items())), **fields)


PLAIN = Contract()
