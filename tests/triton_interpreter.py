"""Triton's interpreter, quicker. It derives facts of a type again at each op, a third of its time. Here they are kept."""
from __future__ import annotations

from typing import Any

#: What `tl.tensor.__init__` takes from its arguments, rather than from the shape.
OWN = ("handle", "type", "dtype")


def keep_types() -> None:
    """Change Triton, for this process, so that the numpy dtype of a type, and the shape of a tensor, are made once each."""
    import triton.language.core as core  # here, since not every environment has Triton
    import triton.runtime.interpreter as interpreter

    dtype_of, init = interpreter._get_np_dtype, core.tensor.__init__
    dtypes: dict[str, Any] = {}
    shapes: dict[tuple[int, ...], dict[str, Any]] = {}

    def kept_dtype(of: Any) -> Any:
        name = of.scalar.name
        if name not in dtypes:
            dtypes[name] = dtype_of(of)
        return dtypes[name]

    def kept_init(self: Any, handle: Any, type: Any) -> None:
        shape = tuple(type.shape) if type.is_block() else ()
        if shape not in shapes:
            init(self, handle, type)
            shapes[shape] = {n: x for n, x in vars(self).items() if n not in OWN}
        self.handle, self.type, self.dtype = handle, type, type.scalar
        vars(self).update(shapes[shape])

    interpreter._get_np_dtype, core.tensor.__init__ = kept_dtype, kept_init
