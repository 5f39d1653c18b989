"""Selects the matrices of the hidden layers of a network by names and shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from functional_optim.combinators.as_matrix import ByPath
from functional_optim.core.paths import Answers, Mask, fits, masked_by, some_of

EMBEDDINGS = ("wte", "wpe", "tok", "token", "tokens", "pos", "position", "positions", "lut")
"""Names of embeddings that lack `embed` or `emb`: those of GPT-2 and the annotated transformer."""

TOP = ("output", "classifier", "score", "fc", "cls", "logits", "to_logits", "qa_outputs", "heads")
"""Output modules at the top of a model: torchtitan, torchvision, Hugging Face's transformers.
`head` and `*_head` are output modules unless they are in a numbered layer."""

WRAPPERS = ("base_model", "model", "module", "net", "network", "_orig_mod", "_fsdp_wrapped_module")
"""Prefixes of names before the top of a model."""


def is_hidden_matrix(path: str, leaf: Any, shape: Sequence[int] | None = None) -> bool:
    """Whether a parameter is a matrix, or a kernel, of a hidden layer.

    False for biases, gains and other parameters with fewer than two dimensions longer than 1,
    embeddings, tables of biases and tokens, the weights of norms, and heads. shape: that of a
    matrix of a stack.

    Example::

        >>> import torch
        >>> from functional_optim.combinators.hidden_matrices import is_hidden_matrix
        >>> w = torch.zeros(4, 4)
        >>> is_hidden_matrix("layers.0.multihead_attn.in_proj_weight", w)
        True
        >>> is_hidden_matrix("lm_head.weight", w), is_hidden_matrix("tok_embeddings.weight", w)
        (False, False)
    """
    if len([n for n in (leaf.shape if shape is None else shape) if n != 1]) < 2:
        return False
    *modules, last = path.lower().split(".")
    holder = modules[-1].rstrip("0123456789") if modules else ""
    if holder.endswith("norm") or "bias" in holder or "bias" in last:
        return False
    if last.endswith(("token", "tokens")):
        return False
    if modules[-1:] == ["shared"] and all(name in WRAPPERS for name in modules[:-1]):
        return False  # the embedding of T5 and BART
    top, layered = True, False
    for name in (*modules, last):
        if name in EMBEDDINGS or "embed" in name or name.startswith("emb") or name.endswith("emb"):
            return False
        if (top and name in TOP) or (not layered and (name == "head" or name.endswith("_head"))):
            return False
        top = top and name in WRAPPERS
        layered = layered or name.isdecimal()
    return True


class HiddenMatrices(Answers):
    """Selects one of two transformations for a leaf: that of matrices, or that of all others.

    who: the recipe, for errors. labels: those of the two. matrices, others: masks of leaves for
    each; `is_hidden_matrix` decides about the others. views: matrix views of leaves, since each
    matrix of a stack counts separately.
    """

    def __init__(
        self,
        who: str,
        labels: tuple[str, str],
        matrices: Mask,
        others: Mask,
        views: ByPath | None = None,
    ) -> None:
        super().__init__({}, labels, "labels")
        self.who = who
        self.claims = [masked_by(mask).answers for mask in (matrices, others)]
        self.views = views

    def __call__(self, path: str, leaf: Any) -> str:
        matrix, other = self.known
        claimed = self.claims[1](path, leaf)
        if leaf.dim() < 2:
            return other
        if self.claims[0](path, leaf):
            if claimed:
                raise ValueError(
                    f"{self.who} got the leaf {path!r} for {matrix} as well as for {other}; let "
                    "one of the two patterns match it."
                )
            return matrix
        if claimed:
            return other
        if path.isdecimal():
            raise ValueError(
                f"{self.who} assigns parameters by name, but a parameter of shape "
                f"{tuple(leaf.shape)} has only the number {path}; pass model.named_parameters(), "
                f"or a dict of parameters by name, or pass {matrix}= and {other}= for each."
            )
        shape = leaf.shape if self.views is None else self.views.shape(path, leaf)
        return matrix if is_hidden_matrix(path, leaf, shape) else other

    @classmethod
    def check_leaves(cls, parts: Sequence[tuple[HiddenMatrices, Mapping[str, Any]]]) -> None:
        """Raise ValueError if no leaf is a matrix, or a pattern matches none.

        A single tensor has no name, and may be a vector.
        """
        leaves = [(own, path, p) for own, known in parts for path, p in known.items()]
        if all(path == "" for _, path, _ in leaves):
            return
        who, (matrix, other) = parts[0][0].who, parts[0][0].known
        paths = [path for _, path, _ in leaves]
        found = [path for own, path, p in leaves if own(path, p) == matrix]
        if not found:
            raise ValueError(
                f"{who} found no matrix of a hidden layer among {some_of(paths)}; name some with "
                f"{matrix}=, e.g. {matrix}=('blocks.*.weight',), or use another optimizer."
            )
        matrices = [path for _, path, p in leaves if p.dim() >= 2]
        claims = [[x for own, _ in parts for x, _ in own.claims[k].patterns] for k in (0, 1)]
        known = [own.views for own, _ in parts if own.views is not None]
        divided, others = [[x for own in known for x in own.named(cut)] for cut in (True, False)]
        for argument, patterns, among, what in (
            (matrix, claims[0], matrices, "matrix"),
            (other, claims[1], paths, "parameter"),
            ("views", divided, found, f"leaf of {matrix}"),
            ("views", others, matrices, "matrix"),
        ):
            for pattern in dict.fromkeys(patterns):
                if not any(fits(pattern, path) for path in among):
                    raise ValueError(
                        f"the pattern {pattern!r} in {argument}= of {who} matches no {what}; there "
                        f"are {some_of(among)}."
                    )
