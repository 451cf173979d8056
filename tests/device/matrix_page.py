"""The page that says what a run of the matrix found."""
from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import Any

KINDS = ("ok", "refused", "not admitted", "slow", "wrong", "error")
#: Where what others' suites said begins, which a new run of the matrix leaves as it was.
SUITES = "## Others' suites"
#: Failures of one reason that the page names.
NAMED = 12

HEAD = """# Verification

This page has the results of the last run of `tests/device/matrix.py` (the matrix). The matrix draws calls from the whole
contract so that each pair of values of two options occurs in at least one call on each target. It compares o, final states
and checkpoints with the token recurrence in float64, by RMSE over RMS. Outputs and workspaces start as NaN. Each call runs
four times and has to give the same bits. Memory between slots of a pool, rows of no sequence and inputs must not change. This
command writes the page:
`python tests/device/matrix.py --write docs/verification.md result.json`.
"""


def _table(head: list[str], rows: list[list[Any]]) -> list[str]:
    return ["| " + " | ".join(head) + " |", "| --- " + "| ---: " * (len(head) - 1) + "|",
            *("| " + " | ".join(str(x).replace("|", "\\|") for x in r) + " |" for r in rows), ""]


def _counts(calls: list[dict[str, Any]], name: str, of: Any) -> list[str]:
    by: dict[Any, Counter[str]] = defaultdict(Counter)
    for c in calls:
        by[of(c)][c["status"]] += 1
    return _table([name, *KINDS], [[n, *(c[k] for k in KINDS)] for n, c in sorted(by.items(), key=str)])


def reason(c: dict[str, Any]) -> str:
    """What a call failed or was refused of, without its numbers, so that equal reasons count as one."""
    text = re.sub(r"\b\d[\d.]*(e[-+]?\d+)?\b", "n", c["why"].splitlines()[0] if c["why"] else "")
    text = re.sub(r"'[^']*/[^']*'|\S*/\S+/\S*", "PATH", text)  # files of this one run
    text = re.sub(r"ScheduleError: .*?(shared of \w+ has n bytes, n are needed).*", r"\1", text)
    text = re.sub(r"DoesNotCompile: schedule: got \S+ for (\w+), which", r"a build", text)
    if c["status"] == "not admitted":
        text = re.sub(r".*?: off are (\w+).*", r"\1 off on the small problem", text)
    if c["status"] == "wrong":  # ('o', error, tolerance), or a sentence
        found = re.match(r"\('(\w+)', (?:.*, )?([\w.+-]+), ([\w.+-]+)\)", c["why"])
        text = f"{found[1]} off" + " (not a number)" * (found[2] == "nan") if found else text
    return re.sub(r"o_S|S_\w+|[GUWA]_\w+", "KERNEL", text)[:200].encode("ascii", "replace").decode()


def _reasons(calls: list[dict[str, Any]], status: str) -> dict[tuple[str, str], list[dict[str, Any]]]:
    out: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for c in calls:
        if c["status"] == status:
            out[c["target"], reason(c)].append(c)
    return dict(sorted(out.items(), key=lambda x: -len(x[1])))


def _row(c: dict[str, Any]) -> str:
    said = {n: x for n, x in c["row"].items() if x not in ((None,) if n == "alike" else (None, False, 0, "none", "given", "log"))}
    return ", ".join(f"{n}={'/'.join(map(str, x)) if isinstance(x, list) else x}" for n, x in said.items())


def _failures(result: dict[str, Any]) -> list[str]:
    calls, lines = result["calls"], []
    again = f"python tests/device/matrix.py --seed {result['seed']}" + " --device cpu" * (result["on"] == "cpu") + " --only"
    for status, title in (("wrong", "Wrong results"), ("error", "Errors")):
        found = _reasons(calls, status)
        lines += [f"## {title}", ""] + ["None.", ""] * (not found)
        for (target, why), some in found.items():
            lines += [f"**{target}: {why}** ({len(some)} calls)", ""]
            for c in some[:NAMED]:
                what = c["why"].splitlines()[0][:120].encode("ascii", "replace").decode() if c["why"] else ""
                lines.append(f"- `{again} {c['target']}:{c['n']}` (call {c['call']}, `{c['build']}`): {what}; {_row(c)}")
            lines += [f"- and {len(some) - NAMED} more"] * (len(some) > NAMED) + [""]
    return lines


def _left(result: dict[str, Any]) -> str:
    """What of the draw was not run, in a line."""
    if result["not_run"]:
        return f"- not run, because the time was up: {len(result['not_run'])} calls or more, from {result['not_run'][0]} on"
    if result["asked"]:
        return f"- ended after {result['asked']} builds, as asked: the rest of the draw was not run"
    return "- all was run"


def page(result: dict[str, Any]) -> str:
    """A run's page, in ASCII."""
    calls = result["calls"]
    all_ = Counter(c["status"] for c in calls)
    pairs = "; ".join(f"{t} {met} of {known}" for t, (met, known) in result["pairs"].items())
    lines = [HEAD, f"- commit {result['commit']}, {result['date']}, {result['device']}; "
             + ", ".join(f"{n} {v}" for n, v in result["versions"].items()),
             f"- seed {result['seed']}, {result['builds']} builds, {len(calls)} calls in {result['seconds']} s on "
             f"{result['workers']} processes: {', '.join(f'{all_[k]} {k}' for k in KINDS)}",
             "- admission check: " + ("on" if result["admission"] else
                                      "off (GDN_CODEGEN_ADMIT=0), so that what a toolchain miscompiles shows as a wrong result"),
             f"- pairs of values of two options that occurred in a call that ran: {pairs} "
             "(without those that no build has room for)",
             *(f"- run again, of the calls that had failed, were slow or did not run: {r['calls']} calls in {r['seconds']} s on "
               f"{r['workers']} processes, commit {r['commit']}, {r['date']}, {r['device']}, {r['limit']:.0f} s a call at most"
               for r in result.get("again", [])), _left(result), ""]
    lines += ["## Counts", ""]
    for name, of in (("target", lambda c: c["target"]), ("schedule", lambda c: f"{c['target']}: {c['row']['schedule']}"),
                     ("inverse", lambda c: c["row"]["inverse"] or "the schedule's"),
                     ("v_block", lambda c: c["row"]["v_block"] or "open"),
                     ("partition", lambda c: c["row"]["partition"] or "none"),
                     ("dtype", lambda c: f"{c['target']}: {c['row']['dtype']}"), ("K", lambda c: c["row"]["K"]),
                     ("V", lambda c: c["row"]["V"]), ("chunk", lambda c: c["row"]["chunk"] or "open"),
                     ("similar keys, with noise of", lambda c: "no" if c["row"]["alike"] is None else c["row"]["alike"])):
        lines += _counts(calls, name, of)
    lines += _seldom(calls, "Refused", "refused")
    over = sum("passed over" in c for c in calls)
    lines += _seldom(calls, "Not admitted", "not admitted",
                     "The kernels gave wrong results on the small problem of the admission check, so the build is refused "
                     "(docs/admission.md). If the call left the schedule open, the op took its next candidate instead: "
                     f"{over} calls, which count by their final status.")
    lines += _seldom(calls, "Slow", "slow", "The compiler did not finish within the time limit of a call. The other calls of the "
                     "build did not run.")
    return "\n".join([*lines, *_failures(result)]).rstrip() + "\n"


def _seldom(calls: list[dict[str, Any]], title: str, status: str, about: str = "") -> list[str]:
    """A section of calls without a result that nothing is wrong with."""
    found = _reasons(calls, status)
    rows = []
    for (target, why), some in found.items():
        builds = sorted({c["n"] for c in some})
        rows.append([f"{target}: {why}", len(some), ", ".join(map(str, builds[:NAMED])) + ", ..." * (len(builds) > NAMED)])
    table = _table(["target, reason", "calls", "builds"], rows)
    return [f"## {title}", "", *([about, ""] if about else []), *(table if found else ["None.", ""])]


def kept(text: str) -> str:
    """What a page says of others' suites."""
    _, head, rest = text.partition(SUITES)
    return f"\n{head}{rest}" if head else ""


def suites(results: list[dict[str, Any]], facts: str) -> str:
    """The section of a run of tests/suites/run_suites.py, in ASCII."""
    count = lambda r, name: sum(r.get(name, {}).values())
    rows = [[r["suite"], r["passed"], len(r["failed"]), count(r, "skipped"), count(r, "different"), count(r, "left out"),
             "yes" if r["done"] else "no"] for r in results]
    lines = [SUITES, "", f"`tests/suites/run_suites.py`, {facts}.", "",
             *_table(["suite", "passed", "failed", "skipped by themselves", "differ", "left out", "all run"], rows)]
    for title, name in (("Failed", "failed"), ("Differ, or are not of this op", "different"),
                        ("Skipped by themselves", "skipped"), ("Left out", "left out")):
        said = [f"- {r['suite']}: {x}" for r in results for x in
                ([f"{n}: {why}" for n, why in r["failed"].items()] if name == "failed" else
                 [f"{n} of {why}" for why, n in r.get(name, {}).items()])]
        lines += [f"**{title}**", "", *(said or ["None."]), ""]
    return "\n" + "\n".join(lines).rstrip().encode("ascii", "replace").decode() + "\n"
