"""Repeated lines as a loop: what it runs is what was written out, and where there is none."""
import re

import pytest

from gdn_codegen.emit import pto
from gdn_codegen.emit.pto import kernel, rolled
from gdn_codegen.runtime.build import Build, lowered

NUMBER = r"(?:\b(0x\w+|\d+) \+ )?\bi\b(?: \* (-?\d+))?"
EVENT, BRACKETS, SUM = re.compile(rf"event_id\({NUMBER}\)"), re.compile(rf"(?<!\w)\({NUMBER}\)"), re.compile(NUMBER)
ELEMENT, TILE = re.compile(r"\[i(?: \+ (\d+))?\]"), re.compile(r"auto (\w+) = tile_at<(.*)>\((0x\w+)\);")
POINTER, ARRAY = re.compile(r"(__gm__ \w+ \*)(\w+) = (.*);"), re.compile(r"(.*[> *])(\w+)\[(\d+)\];")
PLACED, EACH = re.compile(r"place\((\w+), \{(.*)\}\);"), re.compile(r"(for \(int64_t i = 0; i < (\d+); \+\+i\)) (.*)")


def at(text, i):
    """A line in iteration i."""
    def number(m):
        return int(m[1] or "0", 0) + i * int(m[2] or 1)
    text = ELEMENT.sub(lambda m: f"[{int(m[1] or 0) + i}]", text)
    text = EVENT.sub(lambda m: f"EVENT_ID{number(m) % 8}", text)
    return SUM.sub(lambda m: str(number(m)), BRACKETS.sub(lambda m: str(number(m)), text))


def instructions(lines):
    """What lines do, one after the other: with the type and place of each tile and pointer instead of its name."""
    out, known, types, lines = [], {}, {}, [x.partition("  //")[0].strip() for x in lines]
    while lines:
        x = lines.pop(0)
        if m := TILE.fullmatch(x):
            known[m[1]] = f"{m[2]} at {int(m[3], 0)}"
        elif m := POINTER.fullmatch(x):
            known[m[2]] = f"{m[1]} {m[3]}"
        elif m := ARRAY.fullmatch(x):
            types[m[2]] = m[1].strip()
        elif m := PLACED.fullmatch(x):
            known |= {f"{m[1]}[{n}]": f"{types[m[1]]} at {int(a, 0)}" for n, a in enumerate(m[2].split(", "))}
        elif m := EACH.fullmatch(x):
            if m[3] == "{":
                body, depth = [], 1
                while depth:
                    body.append(lines.pop(0))
                    depth += body[-1].count("{") - body[-1].count("}")
                lines[:0] = [at(y, i) for i in range(int(m[2])) for y in body[:-1]]
            else:
                for i in range(int(m[2])):
                    name, _, place = at(m[3], i).rstrip(";").partition(" = ")
                    known[name] = f"{types[name.partition('[')[0]]} {place}"
        elif x:
            words = re.sub(r"\w+(\[\d+\])?", lambda m: known.get(m[0], m[0]), x)
            out.append(re.sub(r"\b0x[0-9a-f]+", lambda m: str(int(m[0], 0)), words))
    return out


def sections(monkeypatch, build):
    """(lines written out, lines with loops) of each section of a build."""
    found = []

    def both(lines):
        found.append((lines, rolled.rolled(lines)))
        return found[-1][1]
    monkeypatch.setattr(kernel, "rolled", both)
    pto.emit(lowered(build), build.layout)
    return found


BUILDS = [("gated_delta_rule", "staged", 128, "float32", 2), ("gated_delta_rule", "staged", 64, "float32", 1),
          ("gated_delta_rule", "fused", 128, "float32", 1), ("rwkv7", "replay", 128, "float16", 1),
          pytest.param("rwkv7", "prepared", 64, "float16", 1, marks=pytest.mark.slow),
          pytest.param("gated_delta_product", "prepared", 128, "float32", 1, marks=pytest.mark.slow)]


@pytest.mark.parametrize("page, schedule, chunk, dtype, loops", BUILDS)
def test_a_loop_runs_what_was_written_out(unchecked, monkeypatch, page, schedule, chunk, dtype, loops):
    """The same instructions on the same tiles and pointers with the same flags, in the same order."""
    every = sections(monkeypatch, Build("pto", chunk, algorithm=page, schedule=schedule, dtype=dtype))
    for written, now in every:
        assert instructions(written) == instructions(now)
    shorter = [(written, now) for written, now in every if written != now]
    assert len(shorter) == loops and all(len(now) < 0.9 * len(written) for written, now in shorter)
    assert all(re.search(r"    for \(int64_t i = 0; i < \d; \+\+i\) \{", "\n".join(now)) for _, now in shorter)


def test_the_inverse_in_float32(unchecked):
    """With each doubling written out and each load in three lines it had 1,891 lines."""
    p = lowered(Build("pto", 128, schedule="staged", dtype="float32"))
    text = next(k.body for k in pto.emit(p, "bthd") if k.name == "Tinv")
    assert len(text.splitlines()) < 870
    assert "TEXTRACT(Tinv_below_n_left, minus_A_n_in[i + 1], 0, 0);" in text


TYPE = "UbTile<float, 1, 8>"


def lines(ids, tables, tiles, order=range(8), more=None):
    """A section of eight steps with six lines each: events, tables of a pointer, addresses of the tiles. more: a line in each."""
    out = [f"    __gm__ float *p_{n}_gm = reinterpret_cast<__gm__ float *>(workspace + table[{t}]);"
           for n, t in enumerate(tables)]
    out += [f"    auto x_{n} = tile_at<{TYPE}>({hex(a)});" for n, a in enumerate(tiles)]
    for n in range(8):
        out += [f"    wait_flag(PIPE_V, PIPE_MTE2, EVENT_ID{ids[n]});  // x_{n} -> y",
                f"    TLOAD(x_{n}, view(p_{n}_gm, 1, 8, 8));", f"    TADDS(x_{order[n]}, x_{n}, 1.0f);",
                *([f"    {more(n)}"] if more else []), "    {", f"        TMULS(x_{n}, x_{n}, -{3 + 2 * n});", "    }"]
    return out


EVEN = dict(ids=[n * 3 % 8 for n in range(8)], tables=[4 + 2 * n for n in range(8)], tiles=[32 * n * n for n in range(8)])


def test_what_differs_from_one_iteration_to_the_next():
    """Pointers that lie evenly, tiles anywhere, numbers in steps, and events in turn."""
    written = lines(**EVEN, more=lambda n: f"f<X<8>, 8>({hex(64 * n)}, group_flag({1 + n}));")
    now = rolled.rolled(written)
    assert now == [
        "    __gm__ float *p_n_gm[8];",
        "    for (int64_t i = 0; i < 8; ++i) p_n_gm[i] = reinterpret_cast<__gm__ float *>(workspace + table[4 + i * 2]);",
        f"    {TYPE} x_n[8];", "    place(x_n, {0x0, 0x20, 0x80, 0x120, 0x200, 0x320, 0x480, 0x620});",
        "    for (int64_t i = 0; i < 8; ++i) {",
        "        wait_flag(PIPE_V, PIPE_MTE2, event_id(i * 3));  // x_n[i] -> y",
        "        TLOAD(x_n[i], view(p_n_gm[i], 1, 8, 8));", "        TADDS(x_n[i], x_n[i], 1.0f);",
        "        f<X<8>, 8>(i * 64, group_flag(1 + i));",
        "        {", "            TMULS(x_n[i], x_n[i], -(3 + i * 2));", "        }", "    }"]
    assert instructions(now) == instructions(written)
    once = rolled.rolled(lines(**EVEN | dict(tiles=[64] * 8)))
    assert f"    auto x_n = tile_at<{TYPE}>(0x40);" in once and "        TADDS(x_n, x_n, 1.0f);" in once


@pytest.mark.parametrize("other", [
    dict(ids=[0, 1, 0, 0, 2, 0, 0, 1]), dict(tables=[4, 6, 8, 11, 12, 13, 19, 20]), dict(order=[3, 1, 0, 2, 6, 5, 4, 7]),
    dict(more=lambda n: "auto z = x;"), dict(more=lambda n: "// a comment"), dict(more=lambda n: f"f<X<{n}>, 8>(0);"),
    dict(more=lambda n: f"f(h_{n});"), dict(more=lambda n: f"f({n}.5f);")])
def test_what_is_no_loop(other):
    """Events or pointers that do not lie evenly, names in two orders, lines that a loop would hide, or that differ otherwise."""
    written = lines(**EVEN | other)
    assert rolled.rolled(written) == written
