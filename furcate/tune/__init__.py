"""What pays where: recorded streams walked with any drafter, and what is fitted from them."""
