"""Launching: pack arguments as data and hand them to the one C++ launcher (templates/host/launcher.cc)."""
