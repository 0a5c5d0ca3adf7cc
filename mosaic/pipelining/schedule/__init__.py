"""Schedules that ranks execute: actions as data, made from orders, and checked."""
