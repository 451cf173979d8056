"""The CUDA headers of device functions."""
from pathlib import Path

#: What functions give to `T.import_source`. A generated module has the headers of its own functions only.
HELPERS = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("*.cuh"))
