"""Machines of clouds: SkyPilot's command is called, and never imported."""
