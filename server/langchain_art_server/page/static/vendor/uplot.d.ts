// The types of uplot.js, whose package is installed for the type checker alone.
export { default } from "uplot";
