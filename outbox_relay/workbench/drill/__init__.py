"""Drills: a fault on embedded parts, what an operator sees meanwhile, and a judgement of the recovery.

`run` runs one drill. `environment` starts the parts and watches them, `observer` shows metrics, `status` and `doctor`,
`promises` has the promised numbers, and `judgement` compares.
"""
