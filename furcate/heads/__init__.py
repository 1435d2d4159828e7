"""Draft heads: small networks that read a target's states and guess its next tokens."""
