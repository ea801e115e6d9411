"""Many ranks in one process: each in a thread of its own, one at a time.

`turns` says whose turn it is, and hands it over where a rank has to wait; `state` is what each rank finds as it left
it; `group` and `store` are what ranks talk through, in memory.
"""
