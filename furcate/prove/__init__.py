"""Evidence that speculation changes nothing: streams compared token for token."""
