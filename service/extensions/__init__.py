"""Extensions of a gateway. Each can be removed; none imports another one."""
