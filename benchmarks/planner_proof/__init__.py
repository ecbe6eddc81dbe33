"""Predicted against measured: how good are the planner's choices on a GPU?

    python -m benchmarks.planner_proof --limit 270 --docs docs/log/planner.md

The proof times every configuration that the planner keeps for some 50 problems, and the engine's own choice. It writes
`results/<gpu>/planner.json` and fills the table of docs/log/planner.md.
"""
