"""The documents in tests/upstream: their snippets, and what their pages of reference declare."""

import pathlib
import re
import types
from dataclasses import dataclass

import numpy as np

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "upstream"
SEQUENCE_PAGES = (
    "distca_orchestrate_simulate",
    "distca_metadata_class",
    "distca_notes",
    "distca_readme",
)
EXPERT_PAGE = "triton_distributed_ep_all2all_layer"


@dataclass(frozen=True)
class Snippet:
    page: str
    number: int  # on its page, from 1
    text: str

    def __str__(self):
        return f"{self.page}-{self.number}"


def text_of(page):
    return (FOLDER / f"{page}.txt").read_text(encoding="utf-8")


def snippets(page):
    """The blocks of Python of a page in Markdown, or in reStructuredText."""
    text = text_of(page)
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    for block in re.findall(
        r"^\.\. code-block:: python\n\n((?:   .*\n|\n)+)", text, flags=re.MULTILINE
    ):
        blocks.append(re.sub(r"^   ", "", block, flags=re.MULTILINE))
    return [Snippet(page, number, block) for number, block in enumerate(blocks, start=1)]


def snippet(page, number):
    return snippets(page)[number - 1]


def answers(text):
    """(expression, what it printed) pairs of a session, plain or of IPython."""
    pairs, source, output = [], None, []
    for line in text.splitlines():
        begin = re.match(r"(?:In \[\d+\]: |> )(.*)", line) or re.match(r"(\w+\(torch\..*)", line)
        if begin:
            if source is not None:
                pairs.append((source, "\n".join(output)))
            source, output = begin.group(1), []
        elif source is not None:
            output.append(re.sub(r"^Out\[\d+\]:\s*", "", line))
    return [*pairs, (source, "\n".join(output))]


def printed_value(text):
    """Lists and numbers of what was printed."""
    return eval(text.strip(), {"tensor": lambda values: values})


def numpy_as_torch():
    """The few names of torch that the snippets use, for arrays."""
    return types.SimpleNamespace(
        Tensor=np.ndarray,
        tensor=lambda values, dtype=None: np.array(values, dtype),
        zeros=lambda shape, dtype=np.float32, device=None: np.zeros(
            [int(extent) for extent in shape], dtype
        ),
        no_grad=lambda: lambda function: function,
        int32=np.int32,
        uint32=np.uint32,
        uint64=np.uint64,
    )


def for_face(face, text):
    """The text for a face: arrays have other names for three methods of tensors."""
    if face.name == "numpy":
        for theirs, ours in ((".numel()", ".size"), (".dim()", ".ndim"), (".to(", ".astype(")):
            text = text.replace(theirs, ours)
    return text


def names_for(face):
    """What a program has after its imports, which are all that changes."""
    names = {name: getattr(face.module, name) for name in face.module.__all__}
    torch = face.torch if face.name == "torch" else numpy_as_torch()
    return {**names, "torch": torch, "device": "cpu"}


def run(face, text, **given):
    """The names that a snippet leaves behind."""
    scope = {**names_for(face), **given}
    exec(compile(for_face(face, text), "<snippet>", "exec"), scope)
    return scope
