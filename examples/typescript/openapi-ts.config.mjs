// One function for each call, named after its operation id. A call answers its data, and throws when it is refused.
export default {
  input: "../../docs/openapi.json",
  output: { path: "src/generated", module: { extension: ".js" } },
  plugins: [
    { name: "@hey-api/client-fetch", throwOnError: true },
    "@hey-api/typescript",
    { name: "@hey-api/sdk", responseStyle: "data" },
  ],
};
