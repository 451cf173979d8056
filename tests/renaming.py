"""Whether two emitted texts are the same but for the names of values and comments."""
import re

TOKEN = re.compile(r"[A-Za-z_]\w*|\d[\w.]*|\S")
#: Of Python, and of C++ (where "//" divides in Python, something stands before it that ends no statement).
COMMENT = re.compile(r"(?m)(?:^\s*|(?<=\s))#(?!if|endif|include|define|undef|else|pragma).*$|(?:^\s*|(?<=[;{}] )\s*)//.*$")
#: Where names begin anew: kernels may name different values alike.
SCOPE = re.compile(r"\n(?=def |class |@|PTO_ENTRY|[A-Z_]+ = )")


def tokens(text):
    """The text without comments, layout, and commas before a closing bracket, which breaking a long line adds."""
    found = TOKEN.findall(COMMENT.sub("", text))
    return [x for x, then in zip(found, [*found[1:], ""], strict=True) if not (x == "," and then in (")", "]", "}"))]


def difference(one, other):
    """What tells two texts apart beside names and comments: the first pair of places that differ, or ""."""
    scopes = [SCOPE.split(x) for x in (one, other)]
    if len(scopes[0]) != len(scopes[1]):
        return f"{len(scopes[0])} and {len(scopes[1])} definitions"
    for a, b in zip(*scopes, strict=True):
        there, back = {}, {}
        x, y = tokens(a), tokens(b)
        for n, (s, t) in enumerate(zip(x, y, strict=False)):
            if not (s[0].isalpha() or s[0] == "_"):
                same = s == t
            else:
                same = there.setdefault(s, t) == t and back.setdefault(t, s) == s
            if not same:
                return f"{' '.join(x[max(0, n - 12):n + 3])} | {' '.join(y[max(0, n - 12):n + 3])}"
        if len(x) != len(y):
            return f"{len(x)} and {len(y)} tokens"
    return ""
