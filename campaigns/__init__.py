"""Hostile campaigns: bounded and seeded, each with an oracle outside the processes that it torments.
`python -m campaigns`."""
