"""Plumbing: files, the hub, processes, trackers, commands."""
