"""What a device has, as data: memory spaces, sizes, agents. Passes read it; nothing here computes."""
from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Device:
    """spaces: bytes of each memory space, 0 where a compiler manages it.

    The next fields name the space in which `place` puts a value: an operand of a product, a product's result, what was
    loaded, a vector, another tile, a number. agents: who can run ops; the first also runs what no rule assigns.
    in_place: an accumulator and a carried value may share the storage of what they become.
    """

    name: str
    target: str
    spaces: dict[str, int] = field(default_factory=dict)
    operand: str = "register"
    product: str = "register"
    loaded: str = "register"
    vector: str = "register"
    tile: str = "register"
    number: str = "register"
    agents: tuple[str, ...] = ("block",)
    in_place: bool = False


#: Triton's compiler allocates registers and shared memory itself.
TRITON = Device("triton", "triton", {"register": 0})

#: One thread block; TileLang's compiler lays out fragments and merges shared buffers by lifetime. 227 KiB a block
#: (CUDA C++ Programming Guide, compute capability 9.0).
HOPPER = Device("hopper", "tilelang", {"shared": 227 * 1024, "fragment": 0, "local": 0}, operand="shared",
                product="fragment", loaded="shared", vector="shared", tile="fragment", number="local", in_place=True)
