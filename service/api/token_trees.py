"""What a verify may say of a tree of drafts."""

from __future__ import annotations

from quire.v1 import executor_pb2, types_pb2

from service.errors import InvalidArgument

# Tokens of a tree: what one sees of it is a number of so many bits.
MAX_TREE_TOKENS = 64


def check_tree(request: executor_pb2.ForwardVerifyRequest) -> None:
    """The parents of a verify, if there are any, make its tokens a tree, of which a path is kept."""
    parents, tokens = request.parents, len(request.token_ids)
    if not parents:
        return
    if len(parents) != tokens - 1:
        text = f"{len(parents)} parents for {tokens} tokens: one for each but the first is needed"
        raise InvalidArgument("BAD_TREE", "parents", text)
    if tokens > MAX_TREE_TOKENS:
        raise InvalidArgument("BAD_TREE", "parents", f"a tree has at most {MAX_TREE_TOKENS} tokens")
    for index, parent in enumerate(parents):
        if parent > index:
            text = f"token {index + 1} follows token {parent}, which does not come before it"
            raise InvalidArgument("BAD_TREE", f"parents[{index}]", text)
    if request.accept == types_pb2.VERIFY_ACCEPT_UNSPECIFIED:
        raise InvalidArgument("BAD_ACCEPT", "accept", "a tree needs a mode that keeps one path of it")
