"""Control flow on one side, computation on the other: `@register` and the worker groups that read it."""
