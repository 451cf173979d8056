"""Triton's interpreter, quicker. It derives facts of types again at each op, half of its time. Here they are kept."""
from __future__ import annotations

from typing import Any

#: What `tl.tensor.__init__` takes from its arguments, rather than from the shape.
OWN = ("handle", "type", "dtype")


def keep_types() -> None:
    """Change Triton, for this process, so that the numpy dtype of a type, a type of blocks, and the shape of a tensor are made
    once each."""
    import triton.language.core as core  # here, since not every environment has Triton
    import triton.runtime.interpreter as interpreter

    dtype_of, init, init_block = interpreter._get_np_dtype, core.tensor.__init__, core.block_type.__init__
    dtypes: dict[str, Any] = {}
    shapes: dict[tuple[int, ...], dict[str, Any]] = {}
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}

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

    def kept_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *[x.value if isinstance(x, core.constexpr) else x for x in shape]
        if key not in blocks:
            init_block(self, element_ty, shape)
            blocks[key] = {n: x for n, x in vars(self).items() if n != "element_ty"}
        self.element_ty = element_ty
        vars(self).update(blocks[key])

    interpreter._get_np_dtype, core.tensor.__init__, core.block_type.__init__ = kept_dtype, kept_init, kept_block
    skip_needless()


def skip_needless() -> None:
    """Change Triton, for this process, so that it converts no operands of one type, broadcasts none of one shape, and takes no
    sum or product again in 64 bits for an assertion that only a build for debugging makes."""
    import triton.language.core as core
    from triton.language.semantic import TritonSemantic

    convert, broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value
    check_overflow = TritonSemantic.binary_op_sanitize_overflow_impl

    def convert_others(self: Any, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
        if (type(lhs) is type(rhs) is core.tensor and lhs.dtype is rhs.dtype and not lhs.dtype.is_ptr()
                and not kwargs and len(args) < 3):  # more arguments are those of divisions, which convert float16, too
            return broadcast_others(self, lhs, rhs)
        return convert(self, lhs, rhs, *args, **kwargs)

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and rhs.type.is_block() and [*lhs.type.shape] == [*rhs.type.shape]:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def check_if_asserted(self: Any, *args: Any) -> None:
        if self.builder.options.debug:
            check_overflow(self, *args)

    TritonSemantic.binary_op_type_checking_impl = convert_others
    TritonSemantic.broadcast_impl_value = broadcast_others
    TritonSemantic.binary_op_sanitize_overflow_impl = check_if_asserted
