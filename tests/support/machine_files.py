"""A machine whose rates are round numbers, without a device."""

MACHINE = """
name = "a machine"
ram = { value = "64GiB", source = "made up" }
memory = { value = 2e10, source = "made up" }

[products]
fp32 = { value = 1e12, source = "made up" }

[steps]
"adamw, fp32" = { value = 1e9, source = "made up" }

[[drives]]
name = "a drive"
read = { value = 2e9, source = "made up" }
write = { value = 1e9, source = "made up" }
mixed = { value = 1.5e9, source = "made up" }
"""
