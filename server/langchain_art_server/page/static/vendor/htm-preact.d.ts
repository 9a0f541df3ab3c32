// The types of htm-preact.js, whose packages are installed for the type checker alone.
export * from "htm/preact";
export { createContext } from "preact";
