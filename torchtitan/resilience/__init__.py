"""Keeps a run alive: restarts, requests to stop, spikes, and replica groups."""
