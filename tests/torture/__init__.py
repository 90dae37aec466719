"""Real runs that are killed, starved and damaged at random moments, and must end as if nothing had happened.

`make torture`, or `PYTHONPATH=tests python -m torture --seed 0 --minutes 5`.
"""
