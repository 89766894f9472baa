"""What generates tokens: the Engine protocol and the engines behind it."""
